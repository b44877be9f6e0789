"""What happens between a public function and a kernel: choice, registration, guards, caches,
launches."""
