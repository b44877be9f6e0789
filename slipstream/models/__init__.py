"""One decoder-only language model; its config lists a mixer per layer, so hybrids are a config.

Importing this registers the model with transformers' AutoConfig, AutoModel, AutoModelForCausalLM;
after `import slipstream` alone they import this where they load such a model
(integrations/auto_models.py).
"""

import sys

from slipstream.common import extras

try:
    import transformers
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ModuleNotFoundError as error:
    raise extras.missing("slipstream.models", error) from None

from slipstream.models.cache import LayerState as LayerState
from slipstream.models.cache import StateCache as StateCache
from slipstream.models.config import MIXERS as MIXERS
from slipstream.models.config import SlipstreamConfig as SlipstreamConfig
from slipstream.models.graphs import Decoding as Decoding
from slipstream.models.model import SlipstreamForCausalLM as SlipstreamForCausalLM
from slipstream.models.model import SlipstreamModel as SlipstreamModel
from slipstream.models.prefixes import PrefixCache as PrefixCache
from slipstream.models.tensor_parallel import shard_heads as shard_heads
from slipstream.models.tensor_parallel import whole_state_dict as whole_state_dict

# the entry that integrations/auto_models.py made is replaced
AutoConfig.register(SlipstreamConfig.model_type, SlipstreamConfig, exist_ok=True)
AutoModel.register(SlipstreamConfig, SlipstreamModel)
AutoModelForCausalLM.register(SlipstreamConfig, SlipstreamForCausalLM)
# Trainer looks a class up among these names to know that its labels are shifted: without the entry
# label_smoothing_factor would compare each token's logits with that token itself. The key is no
# model type, as the table's other readers would look for a module of transformers by it.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[SlipstreamForCausalLM.__name__] = SlipstreamForCausalLM.__name__
# `transformers serve` looks the class that a config names up in transformers, of which it has made
# a second module by then
_SERVER = sys.modules.get("transformers.cli.serving.model_manager")
for _module in {transformers, getattr(_SERVER, "transformers", transformers)}:
    setattr(_module, SlipstreamForCausalLM.__name__, SlipstreamForCausalLM)
