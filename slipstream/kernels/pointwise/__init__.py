"""What acts on each token alone or moves tokens about: rotary, activations, shift, embedding."""
