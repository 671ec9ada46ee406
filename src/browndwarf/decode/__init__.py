"""The in-process runtime: draft, verify and accept on llama.cpp's library, sessions, chat."""
