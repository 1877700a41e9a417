"""The command line: thin, like the nodes, and without ComfyUI. One file a command."""
