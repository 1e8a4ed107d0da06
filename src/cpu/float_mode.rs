//! Float mode of the processor during an optimizer's step.

/// Sets this thread's float mode to the one that Rust assumes and the arithmetic needs (to nearest, subnormals kept, no
/// traps), until dropped. `torch.set_flush_denormal`, or a library built with fast math, may have changed it.
pub(super) struct KeepSubnormals {
    #[cfg(target_arch = "x86_64")]
    before: u32,
}

#[cfg(target_arch = "x86_64")]
impl KeepSubnormals {
    const DEFAULT: u32 = 0x1f80;

    pub(super) fn new() -> Self {
        let mut before = 0_u32;
        // SAFETY: stores the control register to a place of its size.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut before, options(nostack, preserves_flags))
        };
        Self::set(Self::DEFAULT);
        Self { before }
    }

    fn set(mode: u32) {
        // SAFETY: loads the control register from a place of its size; no reserved bit is set.
        unsafe {
            std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack, preserves_flags))
        };
    }
}

#[cfg(target_arch = "x86_64")]
impl Drop for KeepSubnormals {
    fn drop(&mut self) {
        Self::set(self.before);
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl KeepSubnormals {
    pub(super) fn new() -> Self {
        Self {}
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::super::{AdamWOptions, AdamWStep, Gradient, Serial, adamw};
    use super::*;

    #[test]
    fn subnormals_are_kept_and_the_mode_comes_back() {
        const FLUSH: u32 = KeepSubnormals::DEFAULT | 0x8040;
        let subnormal = f32::from_bits(0x0000_4001);
        let options =
            AdamWOptions { lr: 0.5, betas: [0.5, 0.5], eps: 1.0, weight_decay: 0.0, maximize: false };
        let step = AdamWStep::new(&options, 1, 1.0, 1.0).unwrap();
        let (mut p, mut m, mut v) = ([subnormal], [subnormal], [0.0]);
        KeepSubnormals::set(FLUSH);
        adamw(&mut p, &mut m, &mut v, None, &[(step, Gradient::Zero)], &Serial);
        let after = KeepSubnormals::new().before;
        KeepSubnormals::set(KeepSubnormals::DEFAULT);
        assert_eq!(after, FLUSH);
        // Half of an odd subnormal, to nearest even; then p loses that moment: rate is 1, the denominator too.
        assert_eq!((m[0].to_bits(), p[0].to_bits()), (0x0000_2000, 0x0000_2001));
    }
}
