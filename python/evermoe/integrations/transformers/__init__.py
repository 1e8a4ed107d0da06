"""transformers' MoE models under `evermoe.Session`: `pip install evermoe[transformers]`.

    model = AutoModelForCausalLM.from_pretrained(folder)
    make_elastic(model)
    session = evermoe.Session(model, torch.optim.AdamW(model.parameters(), fused=True), sampler)

Importing this registers evermoe's ops as transformers' `experts_implementation="evermoe"` and
`DistributedConfig(ep_implementation="evermoe")`. transformers' Trainer has a module of its own, `trainer`.
"""

from evermoe.integrations.transformers import seams as _seams
from evermoe.integrations.transformers.elastic import make_elastic
from evermoe.integrations.transformers.hub_folder import export, from_pretrained

__all__ = ["export", "from_pretrained", "make_elastic"]

_seams.register()
