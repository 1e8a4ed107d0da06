//! The compiled kernels: one fat binary per source file, with the names of its kernels.

/// Kernels of one source file.
pub(super) struct Binary {
    /// Output of `build.rs`.
    pub(super) image: &'static [u8],
    /// All its kernels. Each is looked up only in its own binary, because tools report every failed lookup.
    pub(super) names: &'static [&'static str],
}

#[cfg(cuda_kernels)]
macro_rules! binary {
    ($file:literal: $($name:literal)*) => {
        Binary { image: include_bytes!(concat!(env!("OUT_DIR"), "/", $file, ".fatbin")), names: &[$($name),*] }
    };
}

#[cfg(not(cuda_kernels))]
pub(super) const BINARIES: &[Binary] = &[];
#[cfg(cuda_kernels)]
#[rustfmt::skip]
pub(super) const BINARIES: &[Binary] = &[
    binary!("histogram": "expert_histograms"),
    binary!("plan": "plan_count_i32" "plan_count_i64" "plan_place_i32" "plan_place_i64"),
    binary!("rows":
        "invert_positions" "permute"
        "unpermute_f32_f32" "unpermute_bf16_f32" "unpermute_bf16_bf16" "unpermute_f16_f32" "unpermute_f16_f16"
        "unpermute_backward_f32_f32_i32" "unpermute_backward_f32_f32_i64"
        "unpermute_backward_bf16_f32_i32" "unpermute_backward_bf16_f32_i64"
        "unpermute_backward_bf16_bf16_i32" "unpermute_backward_bf16_bf16_i64"
        "unpermute_backward_f16_f32_i32" "unpermute_backward_f16_f32_i64"
        "unpermute_backward_f16_f16_i32" "unpermute_backward_f16_f16_i64"),
    binary!("fp8": "quantize_f32" "quantize_bf16" "quantize_f16" "dequantize_f32" "dequantize_bf16" "dequantize_f16"),
    binary!("exchange": "regroup_starts" "regroup" "split_tokens"),
    binary!("replay": "adamw" "sgd"),
    binary!("copy": "pack_chunks" "hash_blocks" "unpack_chunks" "digest_units"),
];
