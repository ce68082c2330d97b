"""Writers of GGUF files, which llama.cpp, Ollama and LM Studio read."""
