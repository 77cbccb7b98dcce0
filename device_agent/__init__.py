"""The device agent: runs one or more stages on a device."""
