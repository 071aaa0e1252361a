"""A recipe of your own: the last layer stays as it is, smoothing is on, and more bytes are spent.

The same as a file: save RECIPE as my-recipe.toml and pass it with `--recipe my-recipe.toml`.
"""

from __future__ import annotations

from smollm2 import model_path

from quantkit.calibrate import calibrate, parse_recipe

RECIPE = """
description = "Per-channel weights; the last layer and the output head stay as they are"
ignore = ["lm_head", "re:.*layers\\\\.{last}\\\\..*"]
kv = "fp8"

[weights]
granularity = "channel"

[inputs]
granularity = "token"
dynamic = true

[tiers]
range = true
compensation = true
smoothing = true
budget = 1.1
"""


def main() -> None:
    from quantkit.calibrate.source import open_source

    layers = open_source(model_path()).config().num_hidden_layers
    recipe = parse_recipe(RECIPE.replace("{last}", str(layers - 1)), "this script", "my-recipe")
    print(calibrate(model_path(), "demo-out/custom", recipe=recipe, samples=16, seq_len=256))


if __name__ == "__main__":
    main()
