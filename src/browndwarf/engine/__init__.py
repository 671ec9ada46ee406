"""llama.cpp: find it, drive its server and tools, hold its pointers."""
