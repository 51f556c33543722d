"""Batch storage: dense, ragged, byte and object columns, sample layouts, and recycled buffers."""
