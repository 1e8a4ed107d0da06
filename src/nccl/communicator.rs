//! One rank of a communicator, its collectives, and its abort.
//!
//! A thread of each communicator ends it when its GPU has waited in a collective for the limit. That thread needs neither
//! Python nor the driver: while a stream is full, a call of the driver may hold up all others, also under Python's lock.

use super::library::{
    BYTE, Config, Handle, IN_PROGRESS, Nccl, SUCCESS, SUM, Status, Stream, UniqueId, failed,
};
use crate::cuda::{Mark, Marks};
use crate::error::{Error, Result};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Time that an abort gives a thread to leave NCCL. Calls return within microseconds unless the CUDA driver holds them up.
const LEAVE: Duration = Duration::from_millis(100);
/// Questions whether a call is over that follow each other without a pause.
const EAGER: u32 = 200;
/// Pause between later questions.
const PAUSE: Duration = Duration::from_micros(50);
/// Longest pause between two checks of a communicator by its thread.
const CHECK: Duration = Duration::from_millis(250);
/// Checks of a communicator by its thread, per limit.
const CHECKS: u32 = 16;

/// Aborts under way in this process.
static ABORTS: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// Waits until all aborts of this process are over, or until `limit` has passed; returns whether they are.
///
/// One whose operations are in a CUDA graph lasts as long as the graph.
pub fn wait_for_aborts(limit: Duration) -> bool {
    let (count, ended) = &ABORTS;
    let count = count.lock().unwrap_or_else(PoisonError::into_inner);
    let (count, _) =
        ended.wait_timeout_while(count, limit, |count| *count > 0).unwrap_or_else(PoisonError::into_inner);
    *count == 0
}

/// One rank's end of a communicator among the GPUs of several processes. Ranks must call the same collectives in the same order.
///
/// A collective is launched on a stream when its call returns, and is over when the stream has passed it. If the
/// communicator is aborted meanwhile, the stream passes it, too, and its output is arbitrary: whoever reads it must ask
/// [`failure`](Self::failure) afterwards.
#[derive(Debug)]
pub struct Communicator {
    nccl: &'static Nccl,
    /// NCCL's communicator; freed once `ended` is set.
    handle: Handle,
    size: usize,
    limit: Duration,
    /// Held during each call of NCCL with the handle but the abort.
    calls: Mutex<()>,
    /// Why the communicator was aborted.
    ended: OnceLock<String>,
    marks: Marks,
    /// What the host may wait for: its mark in the stream, and when it was launched. Held for no call of the driver.
    latest: Mutex<Option<(Mark, Instant)>>,
    has_timed_out: AtomicBool,
    /// The thread that checks the communicator.
    watch: OnceLock<thread::Thread>,
}

// SAFETY: NCCL lets any thread call it with a communicator, one at a time: `calls`.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Creates the name of a new communicator, for one rank to give to the others.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without NCCL in this process, [`Error::Nccl`] if NCCL finds no network interface.
    pub fn unique_id() -> Result<UniqueId> {
        let nccl = Nccl::loaded()?;
        let mut id = UniqueId([0; UniqueId::BYTES]);
        // SAFETY: room for one.
        match unsafe { (nccl.ncclGetUniqueId)(&raw mut id) } {
            SUCCESS => Ok(id),
            status => Err(nccl.error("ncclGetUniqueId", status)),
        }
    }

    /// Begins to connect this process's current CUDA device as one rank; the first collective waits until that is done.
    ///
    /// # Arguments
    /// * `id` - the same on all ranks.
    /// * `device` - number of the current CUDA device.
    /// * `limit` - longest time that the host waits for other ranks, while it connects or launches a collective, and that the
    ///   GPU waits in one; then the communicator is aborted.
    ///
    /// # Errors
    /// [`Error::Unavailable`] without NCCL or a driver in this process, [`Error::Nccl`] if NCCL refuses.
    pub fn connect(
        id: UniqueId,
        rank: usize,
        size: usize,
        device: usize,
        limit: Duration,
    ) -> Result<Arc<Self>> {
        let (nccl, marks) = (Nccl::loaded()?, Marks::new(device)?);
        let as_int =
            |number| c_int::try_from(number).map_err(|_| Error::invalid(format!("{number} ranks: too many")));
        let (rank, ranks) = (as_int(rank)?, as_int(size)?);
        let mut handle = std::ptr::null_mut();
        let config = Config::NON_BLOCKING;
        // SAFETY: room for a handle, and a configuration that lives through the call.
        match unsafe { (nccl.ncclCommInitRankConfig)(&raw mut handle, ranks, id, rank, &raw const config) } {
            SUCCESS | IN_PROGRESS => {
                let own = Arc::new(Self {
                    nccl,
                    handle,
                    size,
                    limit,
                    calls: Mutex::default(),
                    ended: OnceLock::new(),
                    marks,
                    latest: Mutex::default(),
                    has_timed_out: AtomicBool::new(false),
                    watch: OnceLock::new(),
                });
                let (watched, pause) = (Arc::downgrade(&own), CHECK.min(limit / CHECKS));
                let watch = thread::Builder::new().name("evermoe-nccl".into());
                let watch = watch.spawn(move || watch_over(&watched, pause)).map_err(|error| {
                    Error::Unavailable { what: "thread", problem: format!("a thread for NCCL: {error}") }
                })?;
                let _ = own.watch.set(watch.thread().clone());
                Ok(own)
            }
            status => Err(nccl.error("ncclCommInitRankConfig", status)),
        }
    }

    /// Replaces `count` numbers of NCCL's type `kind` (`ncclDataType_t`) by their sums over all ranks, on a stream.
    ///
    /// # Errors
    /// [`Error::Nccl`] if the communicator was aborted or has failed, or if a rank is silent longer than the limit.
    ///
    /// # Safety
    /// `numbers` is memory of this rank's device for as many numbers, which stays valid until the stream has passed.
    pub unsafe fn all_reduce(
        &self,
        numbers: *mut c_void,
        count: usize,
        kind: c_int,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's.
        self.launch("ncclAllReduce", stream, |handle| unsafe {
            (self.nccl.ncclAllReduce)(numbers, numbers, count, kind, SUM, handle, stream)
        })
    }

    /// Gathers `bytes` bytes of each rank, by rank, on a stream.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// `from` has this number of bytes and `into` as many for each rank, in memory of this rank's device that stays valid until
    /// the stream has passed.
    pub unsafe fn all_gather(
        &self,
        from: *const c_void,
        into: *mut c_void,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's.
        self.launch("ncclAllGather", stream, |handle| unsafe {
            (self.nccl.ncclAllGather)(from, into, bytes, BYTE, handle, stream)
        })
    }

    /// Sends `sent[r]` bytes to each rank r and receives `received[r]` bytes from it, both without gaps and by rank, on a stream.
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce); [`Error::Invalid`] for another number of ranks.
    ///
    /// # Safety
    /// `from` has the sum of `sent` and `into` that of `received` as bytes, in memory of this rank's device that stays valid until
    /// the stream has passed.
    pub unsafe fn all_to_all(
        &self,
        (from, sent): (*const c_void, &[usize]),
        (into, received): (*mut c_void, &[usize]),
        stream: Stream,
    ) -> Result<()> {
        if sent.len() != self.size || received.len() != self.size {
            let (sent, received) = (sent.len(), received.len());
            return Err(Error::invalid(format!(
                "{} ranks: got {sent} counts sent, {received} received",
                self.size
            )));
        }
        self.launch("ncclSend", stream, |handle| {
            // SAFETY: it opens a group of this thread.
            let mut status = unsafe { (self.nccl.ncclGroupStart)() };
            let (mut at, mut to) = (from.cast::<u8>(), into.cast::<u8>());
            for (peer, (&sent, &received)) in (0..).zip(sent.iter().zip(received)) {
                if status == SUCCESS && sent > 0 {
                    // SAFETY: the caller's: the part of `from` for this rank.
                    status = unsafe { (self.nccl.ncclSend)(at.cast(), sent, BYTE, peer, handle, stream) };
                }
                if status == SUCCESS && received > 0 {
                    // SAFETY: the caller's: the part of `into` from this rank.
                    status = unsafe { (self.nccl.ncclRecv)(to.cast(), received, BYTE, peer, handle, stream) };
                }
                (at, to) = (at.wrapping_add(sent), to.wrapping_add(received));
            }
            // SAFETY: it closes the group, which must not stay open even after an error.
            let ended = unsafe { (self.nccl.ncclGroupEnd)() };
            if status == SUCCESS { ended } else { status }
        })
    }

    /// Notes that the host may wait from now on for what a stream has to do, unless the stream is being captured.
    ///
    /// # Safety
    /// `stream` is a live stream of the device, or null for the default stream.
    ///
    /// # Errors
    /// If the driver refuses.
    pub unsafe fn mark(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's.
        if let Some(mark) = unsafe { self.marks.put(stream) }? {
            *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some((mark, Instant::now()));
        }
        Ok(())
    }

    /// Whether the GPU has waited longer than this in the latest collective. It calls no driver, and does not wait.
    pub fn has_waited(&self, limit: Duration) -> bool {
        let latest = *self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let waits =
            latest.is_some_and(|(mark, began)| began.elapsed() > limit && !self.marks.is_passed(mark));
        waits || self.has_timed_out()
    }

    /// Whether the communicator was aborted as the GPU had waited in a collective for the limit.
    pub fn has_timed_out(&self) -> bool {
        self.has_timed_out.load(Ordering::SeqCst)
    }

    /// Returns why the communicator was aborted, or None. It calls neither NCCL nor the driver, and does not wait.
    pub fn end(&self) -> Option<String> {
        self.ended.get().cloned()
    }

    /// Returns why the results of collectives cannot be trusted, or None. It asks no GPU and never waits for other ranks.
    pub fn failure(&self) -> Option<String> {
        self.is_idle("ncclCommGetAsyncError").err().map(|error| error.to_string())
    }

    /// Ends all collectives, launched or not, and all waits in this communicator, and returns at once. For any thread.
    ///
    /// A thread of its own calls NCCL, and frees the communicator when its kernels are over and no CUDA graph has them.
    pub fn abort(self: &Arc<Self>) {
        self.abort_for("the communicator was aborted".to_owned());
    }

    fn abort_for(self: &Arc<Self>, reason: String) {
        if self.ended.set(reason).is_err() {
            return;
        }
        if let Some(watch) = self.watch.get() {
            watch.unpark();
        }
        *ABORTS.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        let own = Arc::clone(self);
        let started = thread::Builder::new().name("evermoe-abort".into()).spawn(move || own.free());
        if started.is_err() {
            self.free();
        }
    }

    fn free(&self) {
        // Not held during the abort, which may last: others learn at once that there is nothing to call any more.
        drop(self.enter_within(LEAVE));
        // SAFETY: called once, as only one reason is set; no thread begins a call afterwards, as all look for it under the
        // lock. A thread that is still in NCCL waits for the driver, and so perhaps for the kernels that this call ends.
        unsafe { (self.nccl.ncclCommAbort)(self.handle) };
        *ABORTS.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        ABORTS.1.notify_all();
    }

    /// Aborts the communicator if the GPU has waited for the limit, or if NCCL has failed.
    fn check(self: &Arc<Self>) {
        if self.has_waited(self.limit) {
            self.has_timed_out.store(true, Ordering::SeqCst);
            let seconds = self.limit.as_secs_f64();
            self.abort_for(format!("timed out: the GPU has waited in a collective for {seconds} s"));
            return;
        }
        // Not while another thread calls NCCL, which may last.
        let asked = self.calls.try_lock().ok().map(|held| self.ask("ncclCommGetAsyncError", &held));
        if let Some(Err(error)) = asked {
            self.abort_for(error.to_string());
        }
    }

    /// Calls NCCL once its previous call is over, waits until what it began is launched on the stream, and puts a mark behind it.
    fn launch(&self, call: &str, stream: Stream, start: impl FnOnce(Handle) -> Status) -> Result<()> {
        self.wait(call)?;
        let status = {
            let _held = self.enter(call)?;
            start(self.handle)
        };
        match status {
            SUCCESS => {}
            IN_PROGRESS => self.wait(call)?,
            status => return Err(self.nccl.error(call, status)),
        }
        // SAFETY: the stream of the collective.
        unsafe { self.mark(stream) }
    }

    /// Waits until the latest call is over, which first needs connections to other ranks.
    fn wait(&self, call: &str) -> Result<()> {
        let began = Instant::now();
        for turn in 0.. {
            if self.is_idle(call)? {
                break;
            }
            if began.elapsed() > self.limit {
                let seconds = self.limit.as_secs_f64();
                return Err(failed(
                    call,
                    format!("timed out after {seconds} s without an answer of some rank"),
                ));
            }
            if turn < EAGER { thread::yield_now() } else { thread::sleep(PAUSE) }
        }
        Ok(())
    }

    fn is_idle(&self, call: &str) -> Result<bool> {
        let held = self.enter(call)?;
        self.ask(call, &held)
    }

    /// Whether the latest call is over, or the error with which it ended.
    fn ask(&self, call: &str, _held: &MutexGuard<'_, ()>) -> Result<bool> {
        self.check_alive(call)?;
        let mut status = SUCCESS;
        // SAFETY: a communicator that is not freed while `_held` lives, and room for its status.
        let asked = unsafe { (self.nccl.ncclCommGetAsyncError)(self.handle, &raw mut status) };
        match if asked == SUCCESS { status } else { asked } {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            status => Err(self.nccl.error(call, status)),
        }
    }

    /// Enters NCCL: the communicator lives until the guard is dropped.
    fn enter(&self, call: &str) -> Result<MutexGuard<'_, ()>> {
        let held = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_alive(call)?;
        Ok(held)
    }

    fn check_alive(&self, call: &str) -> Result<()> {
        self.ended.get().map_or(Ok(()), |reason| Err(failed(call, reason.as_str())))
    }

    fn enter_within(&self, limit: Duration) -> Option<MutexGuard<'_, ()>> {
        let began = Instant::now();
        loop {
            match self.calls.try_lock() {
                Ok(held) => return Some(held),
                Err(TryLockError::Poisoned(held)) => return Some(held.into_inner()),
                Err(TryLockError::WouldBlock) if began.elapsed() > limit => return None,
                Err(TryLockError::WouldBlock) => thread::sleep(PAUSE),
            }
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.ended.get().is_none() {
            // SAFETY: nobody else has it, as it is being dropped.
            unsafe { (self.nccl.ncclCommAbort)(self.handle) };
        }
    }
}

/// Checks a communicator until it is aborted or dropped.
fn watch_over(watched: &Weak<Communicator>, pause: Duration) {
    loop {
        thread::park_timeout(pause);
        match watched.upgrade() {
            Some(own) if own.ended.get().is_none() => own.check(),
            _ => return,
        }
    }
}
