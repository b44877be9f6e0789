"""The linear family: one recurrence, of which every operator is an instance (MATH.md)."""
