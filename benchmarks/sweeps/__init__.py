"""What sweeps cost."""
