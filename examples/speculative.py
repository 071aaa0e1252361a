"""Drafting ahead: text that repeats its prompt is decoded several tokens at a time.

The output is the same with and without; only the speed differs. The statistics say how many drafts
were right, and whether drafting paid.
"""

from __future__ import annotations

from smollm2 import model_path

from quantkit import load_fp8
from quantkit.calibrate import calibrate

PASSAGE = (
    "The river rises in the hills north of the town, runs past the old mill and the new school, "
    "and reaches the sea after forty miles. In spring it floods the meadows; in summer children "
    "swim below the bridge."
)
PROMPT = f"{PASSAGE}\n\nThe same text once more:\n\nThe river rises"


def main() -> None:
    calibrate(model_path(), "demo-out/speculative", samples=16, seq_len=256)
    for draft in ("none", "suffix"):
        # deterministic: not even roundings depend on how many rows a pass has.
        model = load_fp8("demo-out/speculative", draft=draft, deterministic=True)
        text = model.generate(PROMPT, max_new_tokens=48, temperature=0.0)
        print(f"--- draft={draft}\n{text}\n{model.stats}\n")


if __name__ == "__main__":
    main()
