#!/bin/sh
# transformers 5.24.0, tokenizers 0.23.3.
#
# A call of a fast tokenizer with truncation=True or padding="max_length" changes the tokenizer, and
# save_pretrained then writes that call's limits into tokenizer.json. AutoTokenizer sets them again
# for each call and hides it; tokenizers' own Tokenizer.from_file, and every engine that reads the
# file with it, cuts and pads all text from then on. Seen: 31 tokens become 4.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" transformers==5.24.0 tokenizers==0.23.3
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

text = "hello world the quick brown fox " * 5
backend = Tokenizer(models.BPE(unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(
    special_tokens=["<unk>", "<pad>"], initial_alphabet=alphabet, show_progress=False
)
backend.train_from_iterator([text], trainer)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>")


def saved(folder):
    tokenizer.save_pretrained(folder)
    direct = Tokenizer.from_file(f"{folder}/tokenizer.json").encode(text).ids
    return len(direct), len(AutoTokenizer.from_pretrained(folder)(text).input_ids)


before = saved("before")
tokenizer([text], truncation=True, max_length=4, padding="max_length")
after = saved("after")
print("tokens by from_file and AutoTokenizer: before the call", before, " after it", after)
assert before[0] == before[1] == after[1] > 20 and after[0] == 4
EOF
