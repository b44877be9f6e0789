"""What Slipstream knows of architectures and compilers, and the tools that compile without a
GPU."""
