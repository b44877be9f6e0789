#!/bin/sh
# torch 2.13.0 on a CPU.
#
# torch.logcumsumexp over logits that begin with -inf (a masked prefix) has finite outputs after it,
# but the gradient of those outputs is NaN at the masked places, though the first outputs, which are
# -inf, take no part in the loss. logsumexp over the same numbers gives 0 there. A masked token in
# front thus turns the parameters behind it to NaN in an otherwise sound loss.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import torch

x = torch.tensor([float("-inf"), 0.0, 1.0], requires_grad=True)
z = torch.logcumsumexp(x, 0)
(scan,) = torch.autograd.grad(z[1:].sum(), x)
(plain,) = torch.autograd.grad(sum(torch.logsumexp(x[: i + 1], 0) for i in (1, 2)), x)
print("outputs", z.tolist(), "\nlogcumsumexp", scan.tolist(), "\nlogsumexp   ", plain.tolist())
assert z[1:].isfinite().all() and scan.isnan().tolist() == [True, False, False]
assert plain[0] == 0 and torch.allclose(scan[1:], plain[1:])
EOF
