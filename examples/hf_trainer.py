"""Hugging Face's Trainer across sites: a tiny Llama, made on the spot. The callback is all that Pier needs.

First site:    python examples/hf_trainer.py --data site-a
Other sites:   python examples/hf_trainer.py --data site-b --peers HOST:PORT --token-file run.token
"""

import torch
from common import CONTEXT, membership, options, rows
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from pier.hf import PierCallback

BATCH = 8


def main() -> None:
    """Train until the run is over."""
    given = options(__doc__, steps=40)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    data = [{"input_ids": row, "labels": row} for row in rows()]
    pier_callback = PierCallback(step_tokens=BATCH * CONTEXT, **membership(given))
    arguments = TrainingArguments(
        output_dir=f"{given.data}/trainer",
        max_steps=given.steps,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        logging_steps=10,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[pier_callback]).train()
    if pier_callback.site and pier_callback.site.finished:
        print("the run is over")


if __name__ == "__main__":
    main()
