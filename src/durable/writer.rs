//! Writes a file and waits until it is on disk.

use super::Content;
use crate::background::lower_priority;
use crate::error::{Error, Result};
use crate::snapshot::digest;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::panic::resume_unwind;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Bytes that a thread writes at a time.
const BLOCK_BYTES: usize = 4 << 20;
/// Alignment of addresses, offsets and lengths of direct writes: that of most disks' blocks, and of memory pages.
const ALIGNMENT: usize = 4096;

/// Writes a new file by `threads` threads of lower priority, and returns once its content is on disk. The name of the
/// file is durable only after a sync of its folder.
///
/// # Errors
/// [`Error::Io`] if the file exists already, or the system refuses; then no file is left, if it can be removed.
pub fn write(path: &Path, content: &Content<'_>, threads: usize) -> Result<()> {
    let doing = |error| Error::file("writing", path, error);
    let file = OpenOptions::new().write(true).create_new(true).custom_flags(libc::O_NOFOLLOW).open(path);
    let file = file.map_err(doing)?;
    let written = fill(path, &file, content, threads).and_then(|()| file.sync_data());
    written.map_err(|error| {
        // Best effort: a remaining file is incomplete, and no manifest names it.
        let _ = fs::remove_file(path);
        doing(error)
    })
}

/// Writes a file like [`write`](fn@write), and computes the digests of some units meanwhile, in one more thread.
///
/// # Errors
/// As [`write`](fn@write).
pub fn write_hashed(path: &Path, content: &Content<'_>, threads: usize, units: &[&[u8]]) -> Result<Vec<u64>> {
    let hash = || units.iter().map(|unit| digest(unit)).collect();
    std::thread::scope(|scope| {
        let hashing = std::thread::Builder::new().name("evermoe-digest".into()).spawn_scoped(scope, || {
            lower_priority();
            hash()
        });
        write(path, content, threads)?;
        Ok(hashing.map_or_else(|_| hash(), |made| made.join().unwrap_or_else(|panic| resume_unwind(panic))))
    })
}

fn fill(path: &Path, file: &File, content: &Content<'_>, threads: usize) -> io::Result<()> {
    reserve(file, content.len())?;
    let blocks = content.len().div_ceil(BLOCK_BYTES);
    let writer = Writer {
        file,
        direct: direct(path).ok(),
        is_direct: AtomicBool::new(true),
        content,
        next: AtomicUsize::new(0),
        problem: Mutex::new(None),
    };
    std::thread::scope(|scope| {
        let threads = threads.clamp(1, blocks.max(1));
        let spawn = || {
            std::thread::Builder::new().name("evermoe-write".into()).spawn_scoped(scope, || {
                lower_priority();
                writer.run();
            })
        };
        if (0..threads).map(|_| spawn()).take_while(io::Result::is_ok).count() == 0 {
            writer.run(); // no thread could be started
        }
    });
    writer.problem.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Reserves the space at once: contiguous on the disk, and no write has to wait for another to extend the file.
fn reserve(file: &File, bytes: usize) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    #[cfg(target_os = "linux")]
    // SAFETY: the descriptor is open for writing; the call touches no memory of this process.
    if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes as libc::off_t) } != 0 {
        let error = io::Error::last_os_error();
        // Some file systems do not support it; then each write allocates its own space.
        if !matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINTR)) {
            return Err(error);
        }
    }
    Ok(())
}

/// Opens the same file for direct writes; some file systems refuse.
fn direct(path: &Path) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    return OpenOptions::new().write(true).custom_flags(libc::O_DIRECT | libc::O_NOFOLLOW).open(path);
    #[cfg(not(target_os = "linux"))]
    Err(io::Error::new(io::ErrorKind::Unsupported, path.display().to_string()))
}

struct Writer<'a> {
    file: &'a File,
    direct: Option<File>,
    /// True until a direct write is refused.
    is_direct: AtomicBool,
    content: &'a Content<'a>,
    /// Index of the next block.
    next: AtomicUsize,
    /// The first error.
    problem: Mutex<Option<io::Error>>,
}

impl Writer<'_> {
    /// One thread: writes block by block, until none is left or an error occurs.
    fn run(&self) {
        let mut buffer = Buffer::new();
        loop {
            let start = self.next.fetch_add(1, Ordering::Relaxed).saturating_mul(BLOCK_BYTES);
            if start >= self.content.len() {
                return;
            }
            let block = &mut buffer.bytes()[..BLOCK_BYTES.min(self.content.len() - start)];
            self.content.copy(start, block);
            if let Err(error) = self.write(block, start as u64) {
                self.next.store(usize::MAX / 2 / BLOCK_BYTES, Ordering::Relaxed);
                self.problem.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                return;
            }
        }
    }

    /// Writes complete units of the disk directly, and the rest through the page cache.
    fn write(&self, block: &[u8], start: u64) -> io::Result<()> {
        let aligned = block.len() / ALIGNMENT * ALIGNMENT;
        let direct = self.direct.as_ref().filter(|_| aligned > 0 && self.is_direct.load(Ordering::Relaxed));
        let Some(direct) = direct else { return self.file.write_all_at(block, start) };
        match direct.write_all_at(&block[..aligned], start) {
            Ok(()) => self.file.write_all_at(&block[aligned..], start + aligned as u64),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                self.is_direct.store(false, Ordering::Relaxed);
                self.file.write_all_at(block, start)
            }
            Err(error) => Err(error),
        }
    }
}

/// Memory for a block, at an address suitable for direct writes.
struct Buffer(NonNull<u8>);

impl Buffer {
    const LAYOUT: Layout = match Layout::from_size_align(BLOCK_BYTES, ALIGNMENT) {
        Ok(layout) => layout,
        Err(_) => panic!("the block's size is a multiple of its alignment"),
    };

    fn new() -> Self {
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc_zeroed(Self::LAYOUT) };
        Self(NonNull::new(memory).unwrap_or_else(|| handle_alloc_error(Self::LAYOUT)))
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: this number of bytes was allocated and zeroed, and nothing else refers to them.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), BLOCK_BYTES) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and not freed before.
        unsafe { dealloc(self.0.as_ptr(), Self::LAYOUT) }
    }
}
