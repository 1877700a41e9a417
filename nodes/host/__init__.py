"""Interface to ComfyUI, one file a subject.

The only part of the pack that imports ``comfy.*`` or ``folder_paths``. It handles networks and images of any family.
"""

from . import (
    devices as devices,
)
from . import (
    folders as folders,
)
from . import (
    images as images,
)
from . import (
    loaded as loaded,
)
from . import (
    memory as memory,
)
from . import (
    operations as operations,
)
from . import (
    progress as progress,
)
from . import (
    queue as queue,
)
from . import (
    server as server,
)
from . import (
    text as text,
)
