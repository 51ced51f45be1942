"""What runs on Ray Serve: the OpenAI endpoint, its configuration and the command line."""
