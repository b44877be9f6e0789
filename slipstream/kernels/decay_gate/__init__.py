"""Log decays out of what a layer projects: the gate of Mamba-2, Gated DeltaNet and KDA."""
