"""How many instances of VNN-COMP's benchmark sets `stagecert verify` decides."""
