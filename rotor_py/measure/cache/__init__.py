"""Measurements that are kept on disk, so that the same stage is not measured again in the next run."""
