//! A memory copy that returns "faulted" where a plain copy would kill the process with SIGBUS.
//!
//! Works like the kernel's exception table under `copy_from_user`: the copy is one instruction at a known
//! address; the SIGBUS handler redirects a fault at exactly that address to a routine that returns 1, and
//! passes every other SIGBUS to the previous handler. Invariants: a lost page is never replaced, so no thread
//! can mistake zeros for data; the handler changes only the interrupted registers, so it is
//! async-signal-safe. The cause of a fault is not determined here: the caller asks `pread`, so that every
//! backend reports the same error. On architectures other than x86-64 `copy_guarded` always returns
//! "faulted", and the mmap backend announces through the mapping and copies by `pread`.

/// The source could not be read: it is past the end of the file, or the device failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Faulted;

/// Copies `length` bytes. After `Faulted` an unknown part of `destination` has been written.
///
/// # Safety
/// `destination` is valid for writes of `length` bytes that nobody else reads or writes meanwhile, `source` lies in
/// a live mapping of at least `length` bytes (whose pages need not be readable), the two do not overlap, and
/// [`install`] has succeeded.
pub(crate) unsafe fn copy_guarded(
    destination: *mut u8,
    source: *const u8,
    length: usize,
) -> Result<(), Faulted> {
    // SAFETY: passed on to the caller.
    unsafe { imp::copy(destination, source, length) }
}

/// Installs the SIGBUS handler, once per process. Keeps the previous disposition for every other SIGBUS.
///
/// # Errors
/// errno of `sigaction`.
pub(crate) fn install() -> Result<(), i32> {
    static INSTALLED: std::sync::OnceLock<Result<(), i32>> = std::sync::OnceLock::new();
    *INSTALLED.get_or_init(imp::install)
}

#[cfg(target_arch = "x86_64")]
mod imp {
    use super::Faulted;
    use std::ffi::{c_int, c_void};
    use std::sync::OnceLock;

    /// The previous handler; std installs one that detects stack overflow.
    static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

    type CopyFn = unsafe extern "sysv64" fn(*mut u8, *const u8, usize, usize) -> u32;
    type FaultFn = unsafe extern "sysv64" fn() -> u32;

    /// Both calls and comparisons use these, so they agree on one address even if the compiler duplicates a
    /// function.
    static COPY: CopyFn = copy_bytes;
    static COPY_FAULTED: FaultFn = copy_faulted;

    /// The System V calling convention puts arguments 1, 2 and 4 where `rep movsb` wants destination, source
    /// and count (rdi, rsi, rcx), and guarantees a clear direction flag. So the function *begins* with the
    /// only instruction that can fault. `rep movsb` is restartable: an interrupt leaves the instruction
    /// pointer on it. With ERMS (every server CPU since 2012) it matches memcpy from a few hundred bytes on.
    #[unsafe(naked)]
    unsafe extern "sysv64" fn copy_bytes(
        destination: *mut u8,
        source: *const u8,
        unused: usize,
        length: usize,
    ) -> u32 {
        core::arch::naked_asm!("rep movsb", "xor eax, eax", "ret")
    }

    /// Where a fault in `copy_bytes` continues. Nothing has been pushed there, so the stack is as at its
    /// entry and this returns to its caller.
    #[unsafe(naked)]
    unsafe extern "sysv64" fn copy_faulted() -> u32 {
        core::arch::naked_asm!("mov eax, 1", "ret")
    }

    pub(super) unsafe fn copy(destination: *mut u8, source: *const u8, length: usize) -> Result<(), Faulted> {
        // SAFETY: the caller's promises are what `rep movsb` needs; a fault of the source is returned as 1.
        let faulted = unsafe { COPY(destination, source, 0, length) };
        if faulted == 0 { Ok(()) } else { Err(Faulted) }
    }

    pub(super) fn install() -> Result<(), i32> {
        // SAFETY: all zeros is a valid `sigaction`: default disposition, empty mask, no flags.
        let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
        // Read before ours is installed, so that the handler always knows the previous one.
        // SAFETY: `previous` is a valid place to write to.
        if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut previous) } != 0 {
            return Err(last_errno());
        }
        let _ = PREVIOUS.set(previous);

        // SAFETY: as above.
        let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
        ours.sa_sigaction = on_sigbus as *const () as libc::sighandler_t;
        // ONSTACK: std's handler, which we call, needs it after a stack overflow. No NODEFER: a fault inside the
        // handler must end the process, not recur.
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        // SAFETY: `ours` names a handler of the SA_SIGINFO shape that is async-signal-safe (see there).
        if unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, std::ptr::null_mut()) } != 0 {
            return Err(last_errno());
        }
        Ok(())
    }

    fn last_errno() -> i32 {
        std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EINVAL)
    }

    /// Async-signal-safe: reads two statics, changes saved registers, calls `sigaction`, `raise` and the previous
    /// handler.
    extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
        // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo.
        // A code of 0 or less was sent by a process (`kill -BUS`): not a fault.
        let code = unsafe { (*info).si_code };
        // Damaged memory that was not accessed yet (only with PR_MCE_KILL_EARLY, sigaction(2)): no instruction faulted,
        // and a previous handler that restores the default action would remove our guard without a recurring fault.
        // Accessing that memory is a separate fault (BUS_MCEERR_AR).
        if code == libc::BUS_MCEERR_AO {
            return;
        }
        let is_fault = code > 0;
        // SAFETY: with SA_SIGINFO the kernel passes a ucontext that is ours until the handler returns.
        let context_ref = unsafe { &mut *context.cast::<libc::ucontext_t>() };
        const RIP: usize = 16;
        const _: () = assert!(libc::REG_RIP == 16);
        let rip = &mut context_ref.uc_mcontext.gregs[RIP];
        if is_fault && rip.cast_unsigned() == COPY as usize as u64 {
            *rip = (COPY_FAULTED as usize as u64).cast_signed();
            return;
        }
        pass_on(signal, info, context, is_fault);
    }

    fn is_installed(signal: c_int) -> bool {
        // SAFETY: all zeros is a valid `sigaction`.
        let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: `now` is a valid place to write to; sigaction is async-signal-safe.
        let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut now) };
        asked == 0 && now.sa_sigaction == on_sigbus as *const () as libc::sighandler_t
    }

    fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void, is_fault: bool) {
        let previous = PREVIOUS.get();
        let action = previous.map_or(libc::SIG_DFL, |previous| previous.sa_sigaction);
        if action == libc::SIG_IGN && !is_fault {
            return;
        }
        if let Some(previous) = previous
            && action != libc::SIG_DFL
            && action != libc::SIG_IGN
        {
            if previous.sa_flags & libc::SA_SIGINFO != 0 {
                // SAFETY: the flag says that the address is a handler of this shape.
                let handler = unsafe {
                    std::mem::transmute::<
                        libc::sighandler_t,
                        extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void),
                    >(action)
                };
                handler(signal, info, context);
            } else {
                // SAFETY: without the flag, and neither default nor ignore, it is a handler of this shape.
                let handler =
                    unsafe { std::mem::transmute::<libc::sighandler_t, extern "C" fn(c_int)>(action) };
                handler(signal);
            }
            // std's handler restores the default action for anything but a stack overflow and returns, relying on the
            // fault to recur. A sent signal does not recur, and would leave the process alive without our guard: send
            // it again, for the disposition that was set.
            if !is_fault && !is_installed(signal) {
                // SAFETY: raise is async-signal-safe.
                unsafe { libc::raise(signal) };
            }
            return;
        }
        // Default action: restore it. A fault recurs as soon as we return, and then ends the process; a sent signal
        // does not, so send it again (it is delivered when this handler returns and unblocks it).
        // SAFETY: all zeros is the default disposition.
        let default: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: `default` is a valid sigaction; sigaction is async-signal-safe.
        unsafe { libc::sigaction(signal, &raw const default, std::ptr::null_mut()) };
        if !is_fault {
            // SAFETY: raise is async-signal-safe.
            unsafe { libc::raise(signal) };
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    use super::Faulted;

    pub(super) unsafe fn copy(_: *mut u8, _: *const u8, _: usize) -> Result<(), Faulted> {
        Err(Faulted)
    }

    pub(super) fn install() -> Result<(), i32> {
        Ok(())
    }
}
