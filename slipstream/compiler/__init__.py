"""Facts about architectures and compilers, and the tools that compile without a GPU."""
