"""A toy transport, which shows that a new transport needs one entry and nothing else.

Its channels stay in one process, but every item goes through the codec, as it would between hosts. Run the
contract on it with ``pytest -p toy -k toy tests/contract``.
"""

import transports

transports.TRANSPORTS.append(
    transports.Transport("toy", "processes", peers=("thread",), copies=True, devices=True)
)
