"""fla.ops: operators, under the modules that fla has them in."""
