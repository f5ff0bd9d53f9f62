"""What runs inside a vLLM, with the Python of its environment: this folder alone is put on its PYTHONPATH."""
