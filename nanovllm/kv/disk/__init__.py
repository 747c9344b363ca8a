"""Disk tier: pages that outlive the engine, one file a page. `store.DiskStore` is its entry."""
