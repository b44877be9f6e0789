# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportAssignmentType=false
"""A kernel in Gluon that waits at a barrier, and invalidates it or not."""
