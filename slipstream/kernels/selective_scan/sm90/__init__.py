"""The selective scan for sm_90, in Gluon; launch.py is imported only where it is chosen."""
