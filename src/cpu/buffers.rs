//! Memory for results that are allocated in each step, kept mapped in between.
//!
//! A large allocation consists of fresh pages each time, and the page faults of their first use cost as much as two to
//! three copies of the same bytes. So returned buffers are handed out again, as torch's allocator does on GPUs.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Smaller buffers are left to the allocator, which keeps them mapped itself.
pub const MIN_BYTES: usize = 1 << 20;
/// Large pages, where the system provides them: fewer faults, and fewer TLB misses for scattered rows.
const PAGE_BYTES: usize = 2 << 20;

/// Memory of `capacity` bytes with one owner.
#[derive(Debug)]
pub struct Buffer {
    start: NonNull<u8>,
    capacity: usize,
}

// SAFETY: it owns its memory.
unsafe impl Send for Buffer {}

impl Buffer {
    fn new(capacity: usize) -> Option<Self> {
        let layout = Layout::from_size_align(capacity, PAGE_BYTES).ok()?;
        // SAFETY: the layout is not empty: a capacity is at least a page.
        let start = NonNull::new(unsafe { alloc(layout) })?;
        #[cfg(target_os = "linux")]
        // SAFETY: a hint about memory that this function owns, in full pages.
        unsafe {
            libc::madvise(start.as_ptr().cast(), capacity, libc::MADV_HUGEPAGE);
        }
        Some(Self { start, capacity })
    }

    /// Returns the address and the capacity; the receiver owns the memory.
    pub fn into_raw(self) -> (NonNull<u8>, usize) {
        let buffer = std::mem::ManuallyDrop::new(self);
        (buffer.start, buffer.capacity)
    }

    /// Recreates the buffer.
    ///
    /// # Safety
    /// The numbers must come from one [`Buffer::into_raw`] and be used once.
    pub unsafe fn from_raw(start: NonNull<u8>, capacity: usize) -> Self {
        Self { start, capacity }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`, and owned.
        unsafe { dealloc(self.start.as_ptr(), Layout::from_size_align_unchecked(self.capacity, PAGE_BYTES)) };
    }
}

/// Idle buffers, and the limit on their bytes.
///
/// Never blocks: a thread that finds the list locked does without, so a child that was forked at that moment cannot
/// deadlock.
#[derive(Debug)]
pub struct Buffers {
    idle: Mutex<Idle>,
    used_bytes: AtomicUsize,
    most_used_bytes: AtomicUsize,
}

#[derive(Debug)]
struct Idle {
    /// Idle buffers; the most recently returned ones are at the back.
    buffers: VecDeque<Buffer>,
    bytes: usize,
    /// Maximum bytes to keep; none for the peak of the bytes in use.
    limit: Option<usize>,
}

impl Default for Buffers {
    fn default() -> Self {
        Self::new()
    }
}

impl Buffers {
    /// An empty list.
    pub const fn new() -> Self {
        let idle = Idle { buffers: VecDeque::new(), bytes: 0, limit: None };
        Self { idle: Mutex::new(idle), used_bytes: AtomicUsize::new(0), most_used_bytes: AtomicUsize::new(0) }
    }

    /// Returns a buffer of at least `bytes` bytes with arbitrary contents, a used one if possible. None if memory is
    /// short, or if nothing may be kept.
    ///
    /// If none has the right size, idle ones are freed: all buffers together never hold more than was in use at the
    /// peak.
    ///
    /// Capacities grow in steps of an eighth to a sixteenth, so that slightly different sizes share buffers. Example:
    /// 5,000,000 bytes result in 6,291,456, three pages of 2 MiB; 100,000,000 in 100,663,296.
    pub fn take(&self, bytes: usize) -> Option<Buffer> {
        let step = (bytes.checked_next_power_of_two()? / 16).max(PAGE_BYTES);
        let capacity = bytes.checked_next_multiple_of(step)?;
        let used = self.used_bytes.load(Relaxed) + capacity;
        let peak = self.most_used_bytes.fetch_max(used, Relaxed).max(used);
        let (warm, dropped) = match self.idle.try_lock() {
            Ok(idle) if idle.limit == Some(0) => return None,
            Ok(mut idle) => match idle.take(capacity) {
                None => (None, idle.shrink(peak - used)),
                warm => (warm, Vec::new()),
            },
            Err(_) => (None, Vec::new()),
        };
        drop(dropped);
        let buffer = warm.or_else(|| Buffer::new(capacity))?;
        self.used_bytes.fetch_add(capacity, Relaxed);
        Some(buffer)
    }

    /// Takes a buffer back; those that have been idle for longest are freed for it.
    pub fn give_back(&self, buffer: Buffer) {
        self.used_bytes.fetch_sub(buffer.capacity, Relaxed);
        let peak = self.most_used_bytes.load(Relaxed);
        let dropped = self.idle.try_lock().map(|mut idle| {
            idle.bytes += buffer.capacity;
            idle.buffers.push_back(buffer);
            idle.shrink(peak)
        });
        drop(dropped); // outside of the lock, as returning pages to the system takes long
    }

    /// Sets the maximum of idle bytes and frees the excess. 0 keeps none and hands out none. `None`, the default, keeps
    /// up to the peak of the bytes in use from now on.
    pub fn set_limit(&self, limit: Option<usize>) {
        let used = self.used_bytes.load(Relaxed);
        self.most_used_bytes.store(used, Relaxed);
        let dropped = self.idle.lock().map(|mut idle| {
            idle.limit = limit;
            idle.shrink(used)
        });
        drop(dropped);
    }

    /// Returns the bytes that are kept and not in use.
    pub fn idle_bytes(&self) -> usize {
        self.idle.lock().map_or(0, |idle| idle.bytes)
    }
}

impl Idle {
    fn take(&mut self, capacity: usize) -> Option<Buffer> {
        let at = self.buffers.iter().rposition(|buffer| buffer.capacity == capacity)?;
        self.bytes -= capacity;
        self.buffers.remove(at)
    }

    /// Removes the oldest buffers until the rest is within the limit.
    fn shrink(&mut self, peak: usize) -> Vec<Buffer> {
        let mut dropped = Vec::new();
        while self.bytes > self.limit.unwrap_or(peak)
            && let Some(oldest) = self.buffers.pop_front()
        {
            self.bytes -= oldest.capacity;
            dropped.push(oldest);
        }
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn hands_out_what_was_given_back_last() {
        let buffers = Buffers::new();
        let (first, second) = (buffers.take(5_000_000).unwrap(), buffers.take(6 * MIB).unwrap());
        assert_eq!((first.capacity, second.capacity), (6 * MIB, 6 * MIB));
        let start = second.start;
        buffers.give_back(first);
        buffers.give_back(second);
        assert_eq!(buffers.idle_bytes(), 12 * MIB);
        assert_eq!(buffers.take(5 * MIB).unwrap().start, start);
        assert_eq!(buffers.idle_bytes(), 6 * MIB);
        assert_eq!(buffers.take(100_000_000).unwrap().capacity, 100_663_296);
        assert_eq!(buffers.idle_bytes(), 0, "6 MiB made room");
    }

    #[test]
    fn holds_no_more_than_was_in_use() {
        let buffers = Buffers::new();
        for size in [3 * MIB, 40 * MIB, 7 * MIB] {
            let buffer = buffers.take(size).unwrap();
            buffers.give_back(buffer);
        }
        assert_eq!(buffers.idle_bytes(), 8 * MIB, "40 MiB were the most: 4 made room for 40, and 40 for 8");
        let large = buffers.take(20 * MIB).unwrap();
        assert_eq!(buffers.idle_bytes(), 8 * MIB, "28 are not too many");
        buffers.give_back(large);
        buffers.set_limit(Some(0));
        assert_eq!(buffers.idle_bytes(), 0);
        assert!(buffers.take(MIB).is_none());
        buffers.set_limit(None);
        let buffer = buffers.take(MIB).unwrap();
        buffers.give_back(buffer);
        assert_eq!(buffers.idle_bytes(), 2 * MIB);
    }

    #[test]
    fn says_no_where_memory_is_short() {
        assert!(Buffers::new().take(usize::MAX - 1).is_none());
        assert!(Buffers::new().take(isize::MAX as usize - PAGE_BYTES).is_none());
    }

    #[test]
    fn is_not_confused_by_threads() {
        let buffers = Buffers::new();
        std::thread::scope(|scope| {
            for seed in 0..4_usize {
                let buffers = &buffers;
                scope.spawn(move || {
                    for round in 0..200 {
                        let buffer = buffers.take(MIB * (1 + (round * (seed + 1)) % 5)).unwrap();
                        // SAFETY: only this thread uses the buffer.
                        unsafe {
                            buffer.start.write(seed as u8);
                            assert_eq!(buffer.start.read(), seed as u8);
                        }
                        buffers.give_back(buffer);
                    }
                });
            }
        });
        assert_eq!(buffers.used_bytes.load(Relaxed), 0);
        let idle = buffers.idle.lock().unwrap();
        assert_eq!(idle.bytes, idle.buffers.iter().map(|buffer| buffer.capacity).sum::<usize>());
    }
}
