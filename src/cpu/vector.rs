//! Loops compiled for the processor's vector instructions.

/// Whether the processor has the parts of AVX-512 that all server processors with AVX-512 have.
#[cfg(target_arch = "x86_64")]
pub(super) fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// Runs a body compiled for AVX-512 or AVX2 if the processor has it. Nothing is fused, so the bits are the same.
#[inline(always)]
pub(super) fn vectorised(body: impl FnOnce()) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn with_avx512(body: impl FnOnce()) {
            body();
        }
        #[target_feature(enable = "avx2")]
        fn with_avx2(body: impl FnOnce()) {
            body();
        }
        if has_avx512() {
            // SAFETY: the processor has AVX-512.
            return unsafe { with_avx512(body) };
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { with_avx2(body) };
        }
    }
    body();
}
