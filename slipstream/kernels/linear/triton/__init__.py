"""The linear family in Triton (sm_70 and later; Triton 3.6 to 3.9).

../plan.py says what it takes and imports no Triton; launch.py does, and is imported when chosen.
"""
