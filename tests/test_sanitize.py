"""What `scripts.sanitize` reads from compute-sanitizer's reports."""

from __future__ import annotations

from scripts.sanitize import Finding, findings

LOG = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at weigh+0x1a0 in /tree/flashstep/stages/accept/accept.cu:64
=========     by thread (32,0,0) in block (1,0,0)
=========     Access to 0x7f0000000010 is out of bounds
========= Error: Race reported between Write access at narrow+0x2c0 in /tree/flashstep/stages/accept/filter.cu:210
=========     and Read access at narrow+0x300 in /tree/flashstep/stages/accept/filter.cu:215 [128 hazards]
========= Error: Race reported between Write access at narrow+0x2c0 in /tree/flashstep/stages/accept/filter.cu:210
=========     and Read access at narrow+0x300 in /tree/flashstep/stages/accept/filter.cu:215 [64 hazards]
========= Warning: Race reported between Read access at void at::native::reduce_kernel<512, 1, float>(T3)+0x2c0
=========     and Write access at void at::native::reduce_kernel<512, 1, float>(T3)+0x300 [16 hazards]
decoded [3, 2] tokens
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
========= ERROR SUMMARY: 1 error
"""


def test_reports_are_counted_by_kernel():
    race = "Error: Race reported between Write access"
    assert findings(LOG) == {
        Finding("weigh", "accept.cu:64", "Invalid __global__ read of size 16 bytes"): 1,
        Finding("narrow", "filter.cu:210", race): 2,
        Finding("at::native::reduce_kernel", "", "Warning: Race reported between Read access"): 1,
    }
    assert not findings("========= COMPUTE-SANITIZER\ndecoded [1] tokens\n========= ERROR SUMMARY: 0 errors\n")
