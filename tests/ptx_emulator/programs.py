"""Programs that tests write as PTX."""

from __future__ import annotations

from tests.ptx_emulator.parse import Program, parse


def program_of(body: str, threads: int = 32) -> Program:
    """Return a program of one parameter, whose address is in %rd1, with these instructions."""
    return parse(f"""
.visible .entry a_kernel(
	.param .u64 .ptr .global .align 1 a_kernel_param_0
)
.reqntid {threads}
{{
	.reg .pred 	%p<4>;
	.reg .b16 	%rs<4>;
	.reg .b32 	%r<4>;
	.reg .b64 	%rd<4>;
	ld.param.b64 	%rd1, [a_kernel_param_0];
{body}
	ret;
}}
""")
