"""KV bytes a token of public models."""

from jaxinfer.planning.kv_table import kv_table
from jaxinfer.planning.presets import PRESETS


def test_grouped_against_all_and_one() -> None:
    rows = {row["model"]: row for row in kv_table()}
    assert list(rows) == list(PRESETS)
    llama = rows["llama-3-8b"]  # 32 layers, 32 query heads, 8 KV heads of 128
    assert llama["attention"] == "GQA" and (llama["heads"], llama["kv_heads"]) == (32, 8)
    assert llama["bytes_per_token"] == {"auto": 131_072, "int8": 67_584, "fp8": 67_584, "int4": 34_816}
    assert llama["mha"] == 4 * 131_072 and llama["mqa"] == 131_072 // 8
    assert rows["llama-2-7b"]["attention"] == "MHA"
    assert rows["llama-2-7b"]["bytes_per_token"]["auto"] == rows["llama-2-7b"]["mha"] == 524_288
    assert rows["gemma-2b"]["attention"] == "MQA"
    assert rows["gemma-2b"]["bytes_per_token"]["auto"] == rows["gemma-2b"]["mqa"] == 18_432
