"""Bytes and records: no torch, no I/O. The text is in docs/format.md."""
