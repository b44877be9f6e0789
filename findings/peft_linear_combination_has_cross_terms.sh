#!/bin/sh
# torch 2.13.0 on a CPU, transformers 5.24.0, peft 0.21.2.
#
# add_weighted_adapter(combination_type="linear") does not add what the adapters do. It adds their A
# and their B, each scaled by the root of the weight, so that every A meets every B: with weights 1
# and 1 of one and the same adapter the result is 4 times its effect, not 2, and of two adapters it
# is off by as much as they do. combination_type="cat" gives the weighted sum.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 transformers==5.24.0 peft==0.21.2
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import torch
from peft import LoraConfig, get_peft_model

torch.manual_seed(0)
config = LoraConfig(r=4, target_modules=["0"])
model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(16, 16)), config, "one").eval()
model.add_adapter("two", config)
for name, parameter in model.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter)
x = torch.randn(8, 16)


def effect(name):
    model.set_adapter(name)
    with model.disable_adapter():
        base = model(x)
    return (model(x) - base).detach()


one, two = effect("one"), effect("two")
model.add_weighted_adapter(["one", "one"], [1.0, 1.0], "doubled", combination_type="linear")
for kind in ("linear", "cat"):
    model.add_weighted_adapter(["one", "two"], [0.7, 0.3], kind, combination_type=kind)
want = 0.7 * one + 0.3 * two
linear, cat = ((effect(x) - want).norm() / want.norm() for x in ("linear", "cat"))
factor = (effect("doubled") / one).median().item()
print("1 + 1:", factor, " 0.7 and 0.3, relative error: linear", linear.item(), " cat", cat.item())
assert abs(factor - 4) < 1e-3 and linear > 0.3 and cat < 1e-5
EOF
