"""What a captured stage keeps that is stored in part."""
