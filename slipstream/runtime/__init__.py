"""The layer between public functions and kernels: choice, registration, guards, caches,
launches."""
