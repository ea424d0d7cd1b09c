#include "textflag.h"

#define SYS_fcntl  25
#define SYS_close  57
#define SYS_exit   93
#define SYS_execve 221

#define F_DUPFD_CLOEXEC 1030
#define LAST_DESCRIPTOR 255

// The kernel enters a program with argc, argv[], nil, envp[], nil on the stack.
TEXT ·entry(SB), NOSPLIT|NOFRAME, $0-0
	MOVD $SYS_fcntl, R8
	MOVD $0, R0
	MOVD $F_DUPFD_CLOEXEC, R1
	MOVD $LAST_DESCRIPTOR, R2
	SVC

	// A failed fcntl only costs the gain: its error is no descriptor, so close refuses it.
	MOVD $SYS_close, R8
	SVC

	MOVD 0(RSP), R3        // argc
	MOVD 16(RSP), R0       // argv[1]
	ADD  $24, RSP, R1      // &argv[2]
	ADD  $16, RSP, R2
	ADD  R3<<3, R2, R2     // envp
	MOVD $SYS_execve, R8
	SVC

	MOVD $127, R0
	MOVD $SYS_exit, R8
	SVC
