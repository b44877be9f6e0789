"""The linear family on sm_90, in Gluon: TMA, asynchronous wgmma, specialised warps."""
