"""The MoE layer: its router, its experts, and the exchange of tokens."""
