"""Bytes only: frames, codecs, messages and topics, without I/O."""
