"""torchvision from a package index is built for GPUs: beside a CPU torch its compiled operators do not load, and then
its shape functions for them must not be registered. Wraps each registration in that condition; a second run changes
nothing.
"""

import re
import sys
from pathlib import Path

path = Path(sys.argv[1]) / "torchvision" / "_meta_registrations.py"
text = path.read_text()
condition = "torchvision.extension._has_ops()"
path.write_text(
    re.sub(
        r'^@torch\.library\.register_fake\(("torchvision::[a-z_]+")\)',
        rf"@(torch.library.register_fake(\1) if {condition} else (lambda function: function))",
        text,
        flags=re.MULTILINE,
    )
)
