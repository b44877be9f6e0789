"""Checkpoints of fla's and transformers' linear models as SlipstreamForCausalLM, and back.

    convert("fla-model", "ours")                        whatever it is, to Slipstream
    convert("ours", "theirs", to="gated_deltanet")      back to one of FAMILIES

A family (families.py) says how a config reads in the other's words, and which weights become which
(rules.py); a checkpoint is read and written a few tensors at a time (files.py). What the other side
has no place for is refused by name.
"""

from slipstream.models.convert.converter import FAMILIES as FAMILIES
from slipstream.models.convert.converter import Converted as Converted
from slipstream.models.convert.converter import convert as convert
