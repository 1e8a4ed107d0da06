//! The copying thread's next action, given the gate and the waiting captures. Pure: no thread, no clock, no memory.
//!
//! ```text
//!                     next                done, with bytes left
//! waiting ──push──► in the queue ──────► a chunk is copied ──────► in the queue …
//!                     │ cancel             │ cancel       └ done, the last bytes ─► complete
//!                     ▼                    ▼
//!                   cancelled            read until done, then cancelled
//! ```
//!
//! Every capture stays at the queue's front until it is complete or cancelled, so captures end in order. `tests`
//! explores all states that two small captures and any events can reach.

use std::collections::VecDeque;

/// The thread's next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Copy this number of bytes of the capture, then call [`Queue::done`]. 0 bytes: the capture is empty.
    Copy { capture: u64, bytes: usize },
    /// Wait for an event.
    Wait,
    /// End the thread.
    Stop,
}

/// Position of a copied chunk in its capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Done {
    /// The capture has more.
    Part,
    /// The last chunk of its capture.
    Last,
    /// A chunk of a capture that was cancelled meanwhile.
    Cancelled,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Job {
    capture: u64,
    /// Bytes that are in no chunk yet.
    left: usize,
    hurried: bool,
}

/// Captures in their order, and the gate.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Queue {
    chunk_bytes: usize,
    /// Bytes that may still be copied; none for no limit.
    allowed: Option<usize>,
    jobs: VecDeque<Job>,
    /// The capture of which a chunk is being copied.
    copying: Option<u64>,
    captures: u64,
    stopped: bool,
}

impl Queue {
    /// An empty queue behind a closed gate, for chunks of at most `chunk_bytes`.
    pub(super) fn new(chunk_bytes: usize) -> Self {
        Self {
            chunk_bytes,
            allowed: Some(0),
            jobs: VecDeque::new(),
            copying: None,
            captures: 0,
            stopped: false,
        }
    }

    /// Adds a capture of `bytes` behind all others; none once the queue is stopped.
    pub(super) fn push(&mut self, bytes: usize) -> Option<u64> {
        if self.stopped {
            return None;
        }
        let capture = self.captures;
        self.captures += 1;
        self.jobs.push_back(Job { capture, left: bytes, hurried: false });
        Some(capture)
    }

    /// Sets the number of bytes that may be copied, or no limit; replaces the previous allowance.
    pub(super) fn open(&mut self, bytes: Option<usize>) {
        self.allowed = bytes;
    }

    /// Lets a capture and all earlier ones pass the gate. Their bytes do not count against the gate's allowance.
    pub(super) fn hurry(&mut self, capture: u64) {
        let ahead = self.jobs.iter_mut().take_while(|job| job.capture <= capture);
        ahead.for_each(|job| job.hurried = true);
    }

    /// Removes a capture unless it is complete or cancelled already. A chunk of it may still be being copied.
    pub(super) fn cancel(&mut self, capture: u64) {
        self.jobs.retain(|job| job.capture != capture);
    }

    /// Removes all captures; no more are accepted.
    pub(super) fn stop(&mut self) {
        self.jobs.clear();
        self.stopped = true;
    }

    /// Whether [`stop`](Self::stop) was called.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Returns the next action. A chunk counts against the gate's allowance when it starts.
    pub(super) fn next(&mut self) -> Action {
        debug_assert!(self.copying.is_none(), "one chunk at a time");
        if self.stopped {
            return Action::Stop;
        }
        let Some(job) = self.jobs.front_mut() else { return Action::Wait };
        let allowed = self.allowed.filter(|_| !job.hurried);
        let bytes = job.left.min(self.chunk_bytes).min(allowed.unwrap_or(usize::MAX));
        if bytes == 0 && job.left > 0 {
            return Action::Wait;
        }
        job.left -= bytes;
        if !job.hurried {
            self.allowed = self.allowed.map(|allowed| allowed - bytes);
        }
        self.copying = Some(job.capture);
        Action::Copy { capture: job.capture, bytes }
    }

    /// Records that the chunk of [`next`](Self::next) is in place.
    pub(super) fn done(&mut self) -> Done {
        let copied = self.copying.take();
        match self.jobs.front() {
            Some(job) if Some(job.capture) != copied => Done::Cancelled,
            None => Done::Cancelled,
            Some(job) if job.left > 0 => Done::Part,
            Some(_) => {
                self.jobs.pop_front();
                Done::Last
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const CHUNK: usize = 2;
    const SIZES: [usize; 3] = [3, 0, 4];

    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    enum End {
        Complete,
        Cancelled,
    }

    /// Bytes of a capture that are actually in place.
    #[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
    struct Truth {
        copied: usize,
        hurried: bool,
        end: Option<End>,
    }

    /// The queue, and the observations of a model that knows only the rules.
    #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
    struct World {
        queue: Queue,
        captures: Vec<Truth>,
        /// Bytes that may still pass the gate.
        allowed: Option<usize>,
        /// Capture and bytes of the chunk being copied.
        reading: Option<(usize, usize)>,
        stopped: bool,
    }

    #[derive(Clone, Copy, Debug)]
    enum Event {
        Push,
        Open(Option<usize>),
        Hurry(usize),
        Cancel(usize),
        Stop,
        /// The thread asks for an action, or reports that it is done.
        Turn,
    }

    impl World {
        fn new() -> Self {
            let queue = Queue::new(CHUNK);
            Self { queue, captures: Vec::new(), allowed: Some(0), reading: None, stopped: false }
        }

        fn events(&self) -> Vec<Event> {
            let mut found = vec![Event::Turn, Event::Stop];
            found.extend([None, Some(0), Some(1), Some(3), Some(7)].map(Event::Open));
            found.extend(
                (0..self.captures.len()).flat_map(|index| [Event::Hurry(index), Event::Cancel(index)]),
            );
            found.extend((self.captures.len() < SIZES.len()).then_some(Event::Push));
            found
        }

        fn after(mut self, event: Event) -> Self {
            match event {
                Event::Push => match self.queue.push(SIZES[self.captures.len()]) {
                    Some(capture) => {
                        assert_eq!((capture, self.stopped), (self.captures.len() as u64, false));
                        self.captures.push(Truth::default());
                    }
                    None => assert!(self.stopped),
                },
                Event::Open(bytes) => {
                    self.queue.open(bytes);
                    self.allowed = bytes;
                }
                Event::Hurry(index) => {
                    self.queue.hurry(index as u64);
                    self.captures[..=index].iter_mut().for_each(|truth| truth.hurried = true);
                }
                Event::Cancel(index) => {
                    self.queue.cancel(index as u64);
                    self.captures[index].end.get_or_insert(End::Cancelled);
                }
                Event::Stop => {
                    self.queue.stop();
                    self.stopped = true;
                    self.captures.iter_mut().for_each(|truth| _ = truth.end.get_or_insert(End::Cancelled));
                }
                Event::Turn => self.turn(),
            }
            self
        }

        fn turn(&mut self) {
            match self.reading.take() {
                Some((index, bytes)) => self.finish(index, bytes),
                None => match self.queue.next() {
                    Action::Copy { capture, bytes } => self.start(capture as usize, bytes),
                    Action::Wait => assert!(!self.stopped && self.must_wait(), "waits for nothing: {self:?}"),
                    Action::Stop => assert!(self.stopped),
                },
            }
        }

        /// A chunk must be of the first capture that has not ended, fit, and pass the gate or be hurried.
        fn start(&mut self, index: usize, bytes: usize) {
            assert!(!self.stopped);
            let truth = &self.captures[index];
            assert_eq!(self.first(), Some(index), "out of turn");
            assert!(bytes <= CHUNK && truth.copied + bytes <= SIZES[index]);
            let left = SIZES[index] - truth.copied;
            assert!(bytes > 0 || left == 0, "a chunk of nothing");
            if !truth.hurried {
                let allowed = self.allowed.unwrap_or(usize::MAX);
                assert!(bytes <= allowed, "past the gate");
                assert_eq!(bytes, left.min(CHUNK).min(allowed), "a chunk smaller than it could be");
                self.allowed = self.allowed.map(|allowed| allowed - bytes);
            }
            self.reading = Some((index, bytes));
        }

        fn finish(&mut self, index: usize, bytes: usize) {
            let truth = &mut self.captures[index];
            truth.copied += bytes;
            let expected = match truth.end {
                Some(End::Complete) => panic!("a chunk of a complete capture"),
                Some(End::Cancelled) => Done::Cancelled,
                None if truth.copied < SIZES[index] => Done::Part,
                None => Done::Last,
            };
            assert_eq!(self.queue.done(), expected, "{index}");
            if expected == Done::Last {
                truth.end = Some(End::Complete);
            }
        }

        fn first(&self) -> Option<usize> {
            self.captures.iter().position(|truth| truth.end.is_none())
        }

        fn must_wait(&self) -> bool {
            self.first().is_none_or(|index| {
                let truth = &self.captures[index];
                SIZES[index] > 0 && !truth.hurried && self.allowed == Some(0)
            })
        }

        /// Turns of the thread until it waits or stops.
        fn run(mut self) -> Self {
            for _ in 0..20 {
                let before = self.clone();
                self.turn();
                if self == before {
                    return self;
                }
            }
            panic!("the thread never rests: {self:?}");
        }
    }

    #[test]
    fn every_reachable_state_keeps_the_rules_and_every_capture_can_end() {
        let mut seen = BTreeSet::new();
        let mut todo = vec![World::new()];
        while let Some(world) = todo.pop() {
            for event in world.events() {
                let next = world.clone().after(event);
                if seen.insert(next.clone()) {
                    todo.push(next);
                }
            }
        }
        assert!(seen.len() > 1000, "{} states", seen.len());
        for world in seen {
            let opened = world.clone().after(Event::Open(None)).run();
            assert_eq!(opened.first(), None, "an open gate leaves something: {world:?}");
            if let Some(last) = world.captures.len().checked_sub(1) {
                let hurried = world.clone().after(Event::Open(Some(0))).after(Event::Hurry(last)).run();
                assert_eq!(hurried.first(), None, "a hurried capture never ends: {world:?}");
            }
            // From now on no byte may be copied except those of the chunk in progress.
            let copied = |world: &World| world.captures.iter().map(|truth| truth.copied).sum::<usize>();
            let closed = world.clone().after(Event::Open(Some(0))).run();
            let in_progress = world.reading.map_or(0, |(_, bytes)| bytes);
            if world.captures.iter().all(|truth| !truth.hurried || truth.end.is_some()) {
                assert_eq!(
                    copied(&closed),
                    copied(&world) + in_progress,
                    "a closed gate lets bytes pass: {world:?}"
                );
            }
        }
    }

    #[test]
    fn chunks_follow_the_gate_to_the_byte() {
        let mut queue = Queue::new(4);
        let capture = queue.push(10).unwrap();
        let mut steps = |allowed: Option<usize>| {
            queue.open(allowed);
            let mut found = Vec::new();
            while let Action::Copy { bytes, .. } = queue.next() {
                found.push((bytes, queue.done()));
            }
            found
        };
        assert_eq!(capture, 0);
        assert_eq!(steps(Some(5)), [(4, Done::Part), (1, Done::Part)]);
        assert_eq!(steps(Some(0)), []);
        assert_eq!(steps(None), [(4, Done::Part), (1, Done::Last)]);
    }
}
