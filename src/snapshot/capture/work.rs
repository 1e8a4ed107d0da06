//! The bytes of one capture: from scattered runs of memory into a buffer, each unit hashed while it is in the cache, or
//! by the device that delivers it.

use crate::background::lower_priority;
use crate::cpu::MAX_SHORT_BYTES;
use crate::cpu::memory::{copy, finish_stream};
use crate::ensure;
use crate::error::{Error, Result};
use crate::snapshot::{Layout, Unit};
use std::any::Any;
use xxhash_rust::xxh3::Xxh3Default;

/// Size of a block that is copied and then hashed at once: it fits the L1 cache, so the source is read from memory
/// once.
const BLOCK_BYTES: usize = 16 << 10;
const LINE_BYTES: usize = 64;

/// Consecutive bytes of CPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Address of the first byte.
    pub address: usize,
    /// Size in bytes.
    pub bytes: usize,
}

/// Fetches more of a capture's bytes to their runs in CPU memory and waits for them. Returns the number of bytes, from
/// the first on, that are readable; in the end all. It is called when all bytes fetched so far were copied, and may
/// then overwrite them. Its argument is the address of the buffer, into which it copies the bytes itself if the capture
/// has no runs. An error cancels the capture.
pub type Fetch = Box<dyn FnMut(*mut u8) -> Result<usize> + Send>;

/// Waits for the digests of units of more than [`MAX_SHORT_BYTES`], in order, which a device has computed from its own
/// bytes. Called once, when all bytes are in place.
pub type Digests = Box<dyn FnOnce() -> Result<Vec<u64>> + Send>;

/// Destination of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Destination {
    /// They are copied to their places in the buffer.
    Buffer,
    /// They are in their places in the buffer when they are fetched.
    InPlace,
}

/// A run and its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    from: usize,
    /// Whether it must be fetched first.
    is_fetched: bool,
    /// Offset in the buffer.
    to: usize,
    bytes: usize,
    unit: usize,
    /// Whether it is the last piece of its unit.
    ends_unit: bool,
}

/// The remaining work of a capture, and the digests so far.
pub(super) struct Work {
    buffer: usize,
    pieces: Vec<Piece>,
    /// The next piece, and the bytes of it that are in place.
    next: usize,
    within: usize,
    hash: Xxh3Default,
    digests: Vec<u64>,
    /// Of the fetched bytes: those in place, and those that are readable.
    copied: usize,
    readable: usize,
    fetch: Option<Fetch>,
    destination: Destination,
    /// Whether a device computes the digest of each unit.
    is_digested: Vec<bool>,
    /// None once the device's digests are known.
    device_digests: Option<Digests>,
    /// Owner of the sources; dropped with the work.
    _kept: Box<dyn Any + Send>,
}

impl Work {
    /// Prepares the copy of `sources`, the runs of each unit, into a buffer that [`begin`](Self::begin) sets; without
    /// sources `fetch` copies all bytes into place. This thread hashes units without `digests`.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) naming the unit whose runs have another size.
    pub(super) fn new(
        layout: &Layout,
        sources: Option<&[Vec<Run>]>,
        fetch: Option<Fetch>,
        digests: Option<Digests>,
        kept: Box<dyn Any + Send>,
    ) -> Result<Self> {
        let num_units = layout.units().len();
        let is_long = layout.units().iter().map(|unit| unit.bytes > MAX_SHORT_BYTES && digests.is_some());
        let is_digested = is_long.collect();
        let mut pieces = Vec::with_capacity(num_units);
        let Some(sources) = sources else {
            let units = layout.units().iter().enumerate().filter(|(_, unit)| unit.bytes > 0);
            pieces.extend(units.map(|(index, unit)| Piece {
                from: 0,
                is_fetched: true,
                to: unit.offset,
                bytes: unit.bytes,
                unit: index,
                ends_unit: true,
            }));
            let work = Self::of(pieces, num_units, Destination::InPlace, fetch, kept);
            return Ok(Self { is_digested, device_digests: digests, ..work });
        };
        ensure!(sources.len() == num_units, "sources: expected {num_units} units, got {}", sources.len());
        for (index, (unit, runs)) in layout.units().iter().zip(sources).enumerate() {
            let runs = runs.iter().map(|&run| (run, fetch.is_some()));
            add_pieces(&mut pieces, index, unit, runs)?;
        }
        let work = Self::of(pieces, num_units, Destination::Buffer, fetch, kept);
        Ok(Self { is_digested, device_digests: digests, ..work })
    }

    fn of(
        pieces: Vec<Piece>,
        num_units: usize,
        destination: Destination,
        fetch: Option<Fetch>,
        kept: Box<dyn Any + Send>,
    ) -> Self {
        Self {
            buffer: 0,
            pieces,
            next: 0,
            within: 0,
            hash: Xxh3Default::new(),
            digests: vec![Xxh3Default::new().digest(); num_units],
            copied: 0,
            readable: 0,
            fetch,
            destination,
            is_digested: vec![false; num_units],
            device_digests: None,
            _kept: kept,
        }
    }

    /// Sets the address of the buffer.
    pub(super) fn begin(&mut self, buffer: *mut u8) {
        self.buffer = buffer.expose_provenance();
    }

    /// Total bytes of all units.
    pub(super) fn total_bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }

    /// Offset in the buffer up to which the units' bytes are in place; none when all are.
    pub(super) fn position(&self) -> Option<usize> {
        self.pieces.get(self.next).map(|piece| piece.to + self.within)
    }

    /// Digests of all units, once all are in place.
    pub(super) fn digests(&self) -> &[u64] {
        &self.digests
    }

    /// Copies the next `bytes` bytes, fetching them first if necessary. After the last ones all digests are known.
    ///
    /// # Errors
    /// The error of fetching or hashing them.
    ///
    /// # Safety
    /// The buffer must have been set and be the layout's. The sources must be readable once fetched, and no other code
    /// may write them or the buffer meanwhile.
    pub(super) unsafe fn advance(&mut self, bytes: usize) -> Result<()> {
        // SAFETY: by the caller's promise.
        let advanced = unsafe { self.copy(bytes) };
        finish_stream();
        advanced?;
        if self.next == self.pieces.len() { self.take_digests() } else { Ok(()) }
    }

    /// Takes the digests that the device has computed.
    fn take_digests(&mut self) -> Result<()> {
        let Some(digests) = self.device_digests.take() else { return Ok(()) };
        let found = digests()?;
        let count = self.is_digested.iter().filter(|&&is_digested| is_digested).count();
        ensure!(
            found.len() == count,
            "digests: expected {count}, one for each long unit, got {}",
            found.len()
        );
        let places = self.digests.iter_mut().zip(&self.is_digested);
        for ((place, _), digest) in places.filter(|&(_, &is_digested)| is_digested).zip(found) {
            *place = digest;
        }
        Ok(())
    }

    unsafe fn copy(&mut self, mut bytes: usize) -> Result<()> {
        while bytes > 0 {
            let Some(&piece) = self.pieces.get(self.next) else { break };
            let mut size = (piece.bytes - self.within).min(bytes);
            if piece.is_fetched {
                if self.copied == self.readable {
                    self.fetch_more()?;
                }
                size = size.min(self.readable - self.copied);
            }
            let is_hashed = !self.is_digested[piece.unit];
            if is_hashed || self.destination == Destination::Buffer {
                size = size.min(BLOCK_BYTES);
                // SAFETY: by the caller's promise.
                let block = unsafe { self.copy_block(piece, size) };
                if is_hashed {
                    self.hash.update(block);
                }
            }
            self.within += size;
            self.copied += if piece.is_fetched { size } else { 0 };
            bytes -= size;
            if self.within == piece.bytes {
                self.finish_piece();
            }
        }
        Ok(())
    }

    /// The next bytes of a piece, once they are in place.
    unsafe fn copy_block<'a>(&self, piece: Piece, size: usize) -> &'a [u8] {
        let to = self.buffer + piece.to + self.within;
        let is_in_place = self.destination == Destination::InPlace;
        let from = if is_in_place { to } else { piece.from + self.within };
        // SAFETY: the piece lies in the sources (`new`, `hashed`), or in the buffer, where it has arrived.
        let from = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(from), size) };
        if self.destination == Destination::Buffer {
            let to = std::ptr::with_exposed_provenance_mut(to);
            // SAFETY: the piece lies in the buffer, the arena's own memory, which does not overlap the sources.
            copy_past_cache(from, unsafe { std::slice::from_raw_parts_mut(to, size) });
        }
        from
    }

    fn fetch_more(&mut self) -> Result<()> {
        let Some(fetch) = &mut self.fetch else { return Ok(()) };
        self.readable = fetch(std::ptr::with_exposed_provenance_mut(self.buffer))?;
        ensure!(self.readable > self.copied, "fetch: expected more than {} bytes", self.copied);
        Ok(())
    }

    fn finish_piece(&mut self) {
        let piece = self.pieces[self.next];
        if piece.ends_unit && !self.is_digested[piece.unit] {
            self.digests[piece.unit] = self.hash.digest();
            self.hash.reset();
        }
        (self.next, self.within) = (self.next + 1, 0);
    }
}

/// Copies the runs of each unit consecutively to its place in `outs`, bypassing the cache, in a low-priority thread;
/// returns when all bytes are copied.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) for runs that do not add up to their units.
///
/// # Safety
/// The runs must be readable and not overlap `outs`, and no other code may write them meanwhile.
pub unsafe fn copy_units(sources: &[Vec<Run>], outs: &mut [&mut [u8]]) -> Result<()> {
    ensure!(
        sources.len() == outs.len(),
        "outs: expected {}, one for each unit, got {}",
        sources.len(),
        outs.len()
    );
    for (runs, out) in sources.iter().zip(outs.iter()) {
        let bytes = runs.iter().fold(0, |bytes: usize, run| bytes.saturating_add(run.bytes));
        ensure!(bytes == out.len(), "sources: expected runs of {} bytes in all, got {bytes}", out.len());
    }
    let work = || {
        lower_priority();
        for (runs, out) in sources.iter().zip(outs) {
            let mut rest = &mut **out;
            for run in runs.iter().filter(|run| run.bytes > 0) {
                // SAFETY: by the caller's promise.
                let from = unsafe {
                    std::slice::from_raw_parts(std::ptr::with_exposed_provenance(run.address), run.bytes)
                };
                let (to, after) = rest.split_at_mut(run.bytes);
                copy_past_cache(from, to);
                rest = after;
            }
        }
        finish_stream();
    };
    std::thread::scope(|scope| {
        let spawned = std::thread::Builder::new().name("evermoe-copy".into()).spawn_scoped(scope, work);
        spawned.map(drop).map_err(|error| Error::io("starting a thread that copies", error))
    })
}

/// Copies full cache lines around the cache, which belongs to the training threads, and the rest through it.
fn copy_past_cache(from: &[u8], to: &mut [u8]) {
    let head = to.as_ptr().align_offset(LINE_BYTES).min(to.len());
    let lines = (to.len() - head) / LINE_BYTES * LINE_BYTES;
    let ((from_head, from), (to_head, to)) = (from.split_at(head), to.split_at_mut(head));
    let ((from, from_tail), (to, to_tail)) = (from.split_at(lines), to.split_at_mut(lines));
    to_head.copy_from_slice(from_head);
    copy(from, to, true);
    to_tail.copy_from_slice(from_tail);
}

/// Adds the pieces of one unit, from its runs and whether they are fetched; adjacent ones are merged.
fn add_pieces(
    pieces: &mut Vec<Piece>,
    index: usize,
    unit: &Unit,
    runs: impl Iterator<Item = (Run, bool)>,
) -> Result<()> {
    let first = pieces.len();
    let mut filled = 0usize;
    for (run, is_fetched) in runs.filter(|(run, _)| run.bytes > 0) {
        ensure!(
            run.address != 0 && run.address.checked_add(run.bytes).is_some(),
            "sources: unit {:?}: {} bytes at address {:#x} are outside the address space",
            unit.name,
            run.bytes,
            run.address
        );
        let to = unit.offset + filled;
        filled = filled.saturating_add(run.bytes);
        if filled > unit.bytes {
            continue;
        }
        match pieces[first..].last_mut() {
            Some(last) if last.from + last.bytes == run.address && last.is_fetched == is_fetched => {
                last.bytes += run.bytes;
            }
            _ => pieces.push(Piece {
                from: run.address,
                is_fetched,
                to,
                bytes: run.bytes,
                unit: index,
                ends_unit: false,
            }),
        }
    }
    ensure!(
        filled == unit.bytes,
        "sources: unit {:?}: expected runs of {} bytes in all, got {filled}",
        unit.name,
        unit.bytes
    );
    if let Some(last) = pieces[first..].last_mut() {
        last.ends_unit = true;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::digest;

    fn layout(sizes: &[usize]) -> Layout {
        let units: Vec<_> =
            sizes.iter().enumerate().map(|(index, &size)| (format!("u{index}"), size)).collect();
        Layout::new("", &units).unwrap()
    }

    fn run(bytes: &[u8]) -> Run {
        Run { address: bytes.as_ptr().expose_provenance(), bytes: bytes.len() }
    }

    #[test]
    fn chunks_of_any_size_give_the_same_bytes_and_digests() {
        let source: Vec<u8> = (0..70_000u32).map(|value| (value * 7 % 251) as u8).collect();
        // Unit 0 in three runs of which two follow each other; unit 1 empty; unit 2 one run, larger than a block.
        let runs = [
            vec![run(&source[500..700]), run(&source[..300]), run(&source[300..301]), run(&source[..0])],
            vec![],
            vec![run(&source[1000..])],
        ];
        let layout = layout(&[501, 0, 69_000]);
        for chunk in [1, 7, 64, 4096, 16_384, 16_385, 1 << 20] {
            let mut buffer = vec![0xEE_u8; layout.payload_bytes()];
            let mut work = Work::new(&layout, Some(&runs), None, None, Box::new(())).unwrap();
            work.begin(buffer.as_mut_ptr());
            assert_eq!((work.pieces.len(), work.total_bytes()), (3, 69_501));
            let mut left = work.total_bytes();
            let mut position = layout.units()[0].offset;
            while left > 0 {
                assert_eq!(work.position(), Some(position));
                let bytes = left.min(chunk);
                // SAFETY: the sources and the buffer live in this function, and nothing else uses them.
                unsafe { work.advance(bytes) }.unwrap();
                left -= bytes;
                let copied = 69_501 - left;
                position = if copied < 501 { 64 + copied } else { layout.units()[2].offset + copied - 501 };
            }
            assert_eq!(work.position(), None);
            let unit = |index: usize| &buffer[layout.units()[index].offset..][..layout.units()[index].bytes];
            assert!(unit(0) == [&source[500..700], &source[..301]].concat() && unit(2) == &source[1000..]);
            assert_eq!(work.digests(), [digest(unit(0)), digest(&[]), digest(unit(2))]);
            assert!(buffer[..64].iter().all(|&byte| byte == 0xEE), "the table is not the copy's to write");
        }
    }

    #[test]
    fn a_device_digests_what_it_delivers_except_for_short_units() {
        let layout = layout(&[501, 0, 69_000, 240, 241]);
        let all: Vec<u8> = (0..layout.payload_bytes()).map(|value| (value * 7 % 251) as u8).collect();
        let expected = layout.units().iter().map(|unit| digest(&all[unit.offset..][..unit.bytes]));
        let expected: Vec<u64> = expected.collect();
        let total = 69_982;
        for in_place in [true, false] {
            let (mut arrived, source) = (0, all.clone());
            let fetch = move |buffer: *mut u8| {
                arrived = (arrived + 10_000).min(total);
                if in_place {
                    // SAFETY: the buffer has as many bytes; the source lies elsewhere.
                    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), buffer, source.len()) };
                }
                Ok(arrived)
            };
            let runs: Vec<Vec<Run>> =
                layout.units().iter().map(|unit| vec![run(&all[unit.offset..][..unit.bytes])]).collect();
            for found in [vec![1, 2, 3], vec![1, 2]] {
                let (sources, count) = ((!in_place).then_some(&runs[..]), found.len());
                let digests: Digests = Box::new(move || Ok(found));
                let (mut buffer, fetch) = (vec![0_u8; layout.payload_bytes()], Box::new(fetch.clone()));
                let mut work = Work::new(&layout, sources, Some(fetch), Some(digests), Box::new(())).unwrap();
                work.begin(buffer.as_mut_ptr());
                let parts = total.div_ceil(4096);
                // SAFETY: the buffer lives in this function, and nothing else uses it.
                let mut advance = || unsafe { work.advance(4096) };
                assert!((1..parts).all(|_| advance().is_ok()));
                if count == 2 {
                    let error = advance().unwrap_err().to_string();
                    assert_eq!(error, "digests: expected 3, one for each long unit, got 2");
                    continue;
                }
                advance().unwrap();
                assert_eq!(work.position(), None);
                assert_eq!(work.digests(), [1, expected[1], 2, expected[3], 3]);
                for unit in layout.units() {
                    let bytes = unit.offset..unit.offset + unit.bytes;
                    assert!(buffer[bytes.clone()] == all[bytes], "{}", unit.name);
                }
            }
        }
    }

    #[test]
    fn units_are_copied_from_their_runs() {
        let source: Vec<u8> = (0..70_000u32).map(|value| (value * 7 % 251) as u8).collect();
        let runs = [
            vec![run(&source[500..700]), run(&source[..0]), run(&source[..301])],
            vec![],
            vec![run(&source)],
        ];
        let mut all = vec![0xEE_u8; 80_000];
        let (first, rest) = all.split_at_mut(501);
        let (second, rest) = rest.split_at_mut(0);
        let mut outs = [first, second, &mut rest[3..70_003]];
        // SAFETY: the sources and the places live in this function, and nothing else uses them.
        unsafe { copy_units(&runs, &mut outs) }.unwrap();
        assert!(all[..501] == [&source[500..700], &source[..301]].concat() && all[504..70_504] == source);
        assert!(all[501..504].iter().chain(&all[70_504..]).all(|&byte| byte == 0xEE));
        let mut short = [&mut all[..1]];
        // SAFETY: as above.
        let error = unsafe { copy_units(&runs[2..], &mut short) }.unwrap_err();
        assert_eq!(error.to_string(), "sources: expected runs of 1 bytes in all, got 70000");
    }

    #[test]
    fn wrong_runs_are_refused_by_name() {
        let layout = layout(&[4, 8]);
        let source = [0_u8; 16];
        let message = |runs: &[Vec<Run>]| match Work::new(&layout, Some(runs), None, None, Box::new(())) {
            Ok(_) => panic!("accepted"),
            Err(error) => error.to_string(),
        };
        assert_eq!(message(&[vec![]]), "sources: expected 2 units, got 1");
        let short = message(&[vec![run(&source[..4])], vec![run(&source[..3]), run(&source[8..12])]]);
        assert_eq!(short, "sources: unit \"u1\": expected runs of 8 bytes in all, got 7");
        assert!(
            message(&[vec![run(&source[..5])], vec![]])
                .contains("\"u0\": expected runs of 4 bytes in all, got 5")
        );
        let huge = Run { address: usize::MAX - 2, bytes: 4 };
        assert!(message(&[vec![huge], vec![]]).contains("\"u0\": 4 bytes at address 0xfff"));
        assert!(
            message(&[vec![Run { address: 0, bytes: 4 }], vec![]]).contains("are outside the address space")
        );
    }
}
