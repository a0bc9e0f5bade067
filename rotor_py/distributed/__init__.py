"""Distributed training: groups of processes, parameters sharded by `fully_shard`, and pipelines."""
