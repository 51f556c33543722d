"""Arrow IPC files and streams, Arrow tables, and the conversion of Arrow data for other formats."""
