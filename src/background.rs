//! Priority of background threads, which must not slow down training.

/// Lowers the priority of the calling thread: on Linux it becomes a batch job with its nice value raised by 5.
///
/// Best effort: where the system refuses, the priority is unchanged.
pub(crate) fn lower_priority() {
    #[cfg(target_os = "linux")]
    // SAFETY: plain calls; on Linux both affect only the calling thread.
    unsafe {
        let _ = libc::nice(5);
        let parameters = std::mem::zeroed::<libc::sched_param>();
        let _ = libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameters);
    }
}
