"""fla.ops.utils.constant."""

RCP_LN2 = 1.4426950408889634  # 1 / ln 2
